"""The referee: checks the speculative decoding of any engine against laws that are known in closed form.

`forerun verify TARGET` runs it; `docs/verify.md` describes it. No module here imports torch before a target needs it.
"""
