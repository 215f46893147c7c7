"""The command line: one file per command. Nothing here imports torch until a command needs it."""
