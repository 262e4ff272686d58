"""The command line: its commands and their options."""
