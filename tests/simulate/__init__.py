"""Simulated servers and heads over the lab's simulated device, for tests of the engine and the controller."""
