"""Drafts of maps for models that have none: what `widen-ckpt maps --draft MODEL` prints."""

from widen_cli.drafts.draft import Draft, draft

__all__ = ["Draft", "draft"]
