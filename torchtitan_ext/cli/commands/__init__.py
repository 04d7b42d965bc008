"""One module per command of ``torchtitan-ext``: its ``run`` is the command."""
