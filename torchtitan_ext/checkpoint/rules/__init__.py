"""What a load is asked to do: policy, names, parameter groups; and the report of what it will do."""
