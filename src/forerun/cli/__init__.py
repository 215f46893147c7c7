"""The command line: a file per command or kind of command. Nothing here imports torch until a command needs it."""
