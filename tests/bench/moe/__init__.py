"""Tests of forerun.bench.moe."""
