"""From a checkpoint and a configuration to an engine: which drafts, how much memory."""
