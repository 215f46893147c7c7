"""Drafters guess what the target will say next. Adding one: docs/write-a-drafter.md."""
