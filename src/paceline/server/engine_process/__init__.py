"""The process in which an engine lives, and the messages to and from it."""
