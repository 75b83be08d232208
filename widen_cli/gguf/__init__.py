"""GGUF files: a strict reader and a writer of headers, metadata values carried verbatim, models in several parts."""
