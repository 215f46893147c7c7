"""What look-ups would gain: real texts, drafters and controller, with the times of a GPU or a CPU counted."""
