"""What a model remembers of its texts: blocks of keys and values, states, shared prefixes."""
