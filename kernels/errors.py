"""The one root of errors that are the user's to mend.

Every folder raises `UserError` (or a subclass of its own) with a message that names the value, the
limit and the remedy. The command line prints that message and exits with code 2; anything else that
escapes is a fault of ours and exits with 1. `assert` is for our own invariants.
"""

from __future__ import annotations


class UserError(Exception):
    """Input that cannot be used as given. The message names the value, the limit and the remedy."""
