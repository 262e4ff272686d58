"""Commands that train drafts."""
