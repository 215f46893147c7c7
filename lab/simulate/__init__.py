"""The simulated device: time is counted, never measured, and engine, controller and look-ups are real."""
