"""The subcommands of the command line, one module each.

A module has `add_arguments(parser)` and `run(arguments)`, which returns the exit status. It is
imported only when its command is called; what takes long to import, it imports in `run`.
"""
