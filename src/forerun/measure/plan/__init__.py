"""A planner: how many replicas a load wants, which drafter, and what a million tokens cost, from measured times."""
