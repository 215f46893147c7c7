"""The Spec-Bench table: every drafter of the package on every task, at T=0 and T=1, in one command."""
