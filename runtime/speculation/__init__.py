"""Several tokens a step: proposals that the model verifies, without changing what it says.

A `Proposer` guesses what comes next, from the text so far (`PromptLookup`), from what the model has
said of earlier guesses (`Lookahead`) or by a smaller model (`DraftModel`). The engine runs the
guesses behind the last token, as it runs a chunk of a prompt, and keeps those that it would have
drawn itself (runtime/step_results.py, sampling/picker.py). `Governor` measures whether that pays;
`Speculator` is what the engine holds of all this.
"""

from .proposer import Drafting, Proposal, Proposer, Verified
from .speculator import Speculator

__all__ = ["Drafting", "Proposal", "Proposer", "Speculator", "Verified"]
