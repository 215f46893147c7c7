"""Drafters: what drafts the tokens that the target may sample next. Adding one: docs/write-a-drafter.md."""
