"""The engine of a server on a thread, or in a process of its own: then HTTP and rounds share no interpreter.

    forerun serve                           the front: HTTP, tokenizer, answers; the process to signal
    └── python -m forerun.server.backends   the engine: model, KV cache, rounds; ends with the front

Between them is a pair of sockets. The front sends what came within one turn of its event loop (texts to write, texts to
drop) as one message, the engine sends what one round added to all texts as one message.
"""
