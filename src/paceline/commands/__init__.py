"""The bodies of the command line's commands. :mod:`paceline.cli` names them; these do the work."""
