"""The decoder on a CPU: its ops compiled by Numba, run one after the other by a team of threads.

torch's ops cost more than their work where a step has few tokens, and CPUs without AMX or VNNI have
no fast product of packed weights in torch. Here a step is a tape: a list of ops with the addresses
of what they read and write, which all threads walk through together, with a barrier after each op
(`program`, `team`). What an op does is in `ops`; products are in `products`, of tiles that are
emitted as LLVM IR (`tiles`), since their speed hangs on which instructions they are.
"""
