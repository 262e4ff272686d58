"""The step and its verbs: schedule, propose, plan, pack, forward, verify, commit, observe."""
