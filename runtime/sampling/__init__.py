"""From logits to tokens, in the order of use: what may be asked for (params), what changes logits
before a draw (adjust, grammar), the numbers behind a draw (philox), what is told of it (logprobs),
all of it for the rows of a step (picker), and the search over beams (beams). The cuts and the draw
themselves are runtime/sampler.py.
"""
