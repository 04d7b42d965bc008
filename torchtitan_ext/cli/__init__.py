"""The command line. ``app`` knows the commands; each is a module of this room with one function ``run``."""
