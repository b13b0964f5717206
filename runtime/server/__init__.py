"""The engine over HTTP, as OpenAI's interface has it: `quantize serve`.

The way of a request: frame.py (its id, its log line, the last resort for errors), gate.py (key,
rate, size), a route of completions.py, chat.py, embeddings.py or tokens.py, which turns the body
(protocol.py) into requests of the engine, generation.py, which runs them until the client goes, and
back as an answer (answers.py). service.py holds what all of them share: the engine's life from
loading to its end. Needs the extra `serve`; run.py is the entry, which says so.
"""
