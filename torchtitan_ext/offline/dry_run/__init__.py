"""What a save or load of a job would do, worked out in one process by the job's own planners."""
