"""What to change where something does not fit: one entry for each kind of trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..linear_plan import GROUP_SIZES, Plan
from ..spec import Group
from .foresee import Foresight
from .modules import ModulePlan
from .parallel import SIZES, UnlikePeers, unlike_peers

SHOWN = 3  # modules that an entry names
TIED_SHARE = 0.25  # of the output, from which a tied embedding is worth a word


class Advice(NamedTuple):
    """trouble: what does not fit, where and why. remedy: what to change. modules: how many linears
    it is about, 0 where it is about the run."""

    trouble: str
    remedy: str
    modules: int = 0


class Surroundings(NamedTuple):
    """tied_bytes: of an embedding that is the output head too, 0 where the model has none.
    available: bytes of memory that this machine has left, None where it does not say."""

    tied_bytes: int
    available: int | None


def advise(
    modules: Sequence[ModulePlan],
    peers: Sequence[UnlikePeers],
    foresight: Foresight,
    around: Surroundings,
) -> list[Advice]:
    """What the user may want to change, the gravest first."""
    quantized = [m for m in modules if m.scheme is not None]
    return [
        *_memory(foresight, around.available),
        *_peers(peers),
        *_vllm(quantized),
        *_cuts(quantized),
        *_lowbit(quantized),
        *_llama_cpp(quantized),
        *_tied(foresight, around.tied_bytes),
    ]


def _memory(foresight: Foresight, available: int | None) -> list[Advice]:
    peak = foresight.memory.host
    if available is None or peak <= available:
        return []
    parts = foresight.memory.parts
    worst = max(parts, key=parts.__getitem__)
    return [
        Advice(
            f"peak memory {peak / 1e9:.1f} GB, of which {worst} {parts[worst] / 1e9:.1f} GB, but "
            f"{available / 1e9:.1f} GB are free",
            "fewer --samples, a smaller --batch-size, --order parallel, or --method rtn, which "
            "streams weights",
        )
    ]


def _peers(peers: Sequence[UnlikePeers]) -> list[Advice]:
    if not peers:
        return []
    return [
        Advice(
            f"engines run {_names([' + '.join(_leaves(p.modules)) for p in peers])} as one linear, "
            "but their schemes differ: vLLM refuses to load them",
            "give them one scheme: target or ignore them together",
            sum(len(p.modules) for p in peers),
        )
    ]


def peer_notes(plan: Plan) -> list[str]:
    """The same of a plan, as notes of a run."""
    schemes = {**dict.fromkeys(plan.untouched), **{n: p.scheme for n, p in plan.linears.items()}}
    return [f"{a.trouble}; {a.remedy}" for a in _peers(unlike_peers(schemes))]


def _vllm(modules: Sequence[ModulePlan]) -> list[Advice]:
    none = [m for m in modules if m.vllm is not None and not m.vllm.runs]
    return [
        Advice(
            f"no kernel of vLLM takes {names}: {why}",
            "a scheme or --group-size that its kernels have (W4A16 in groups of 128, 64 or 32, "
            "W8A8, FP8_DYNAMIC), or leave these linears out with --ignore",
            count,
        )
        for why, names, count in _by_reason(none, lambda m: _reasons(m.vllm))
    ]


def _cuts(modules: Sequence[ModulePlan]) -> list[Advice]:
    """One entry for each kind of linear that some numbers of devices cannot share."""
    stopped: dict[tuple[str, tuple[int, int], tuple[int, ...]], list[ModulePlan]] = {}
    for m in modules:
        numbers = tuple(n for n in SIZES if m.cuts.get(n))
        if numbers:
            leaf = m.name.rpartition(".")[2]
            stopped.setdefault((leaf, m.shape, numbers), []).append(m)
    found = []
    for (_, _, numbers), members in stopped.items():
        named = _names(_leaves([m.name for m in members]))
        first, n = members[0], numbers[0]
        devices = ", ".join(map(str, numbers))
        found.append(
            Advice(
                f"{devices} devices cannot share {named}: {first.cuts[n]}",
                _cut_remedy(first, n),
                len(members),
            )
        )
    return found


def _cut_remedy(module: ModulePlan, devices: int) -> str:
    """A group size that `devices` could share, where groups are what stands in the way."""
    scheme, columns = module.scheme, module.shape[1]
    if scheme is None or not isinstance(scheme.weights.granularity, Group):
        return "fewer devices"
    free = scheme.weights.scale_dtype == "model"
    if module.role != "row" or columns % devices or not free:
        return "fewer devices"
    fits = next((size for size in GROUP_SIZES if columns % (devices * size) == 0), None)
    smaller = "" if fits is None else f"--group-size {fits} for {devices} devices, "
    return f"{smaller}--group-size -1 (one scale a row), or fewer devices"


def _lowbit(modules: Sequence[ModulePlan]) -> list[Advice]:
    slow = [m for m in modules if m.lowbit is not None and m.lowbit.runs in ((), ("dequant",))]
    return [
        Advice(
            f"lowbit's runtime dequantizes {names} on every call: {why}",
            "for speed here, a scheme or --group-size that a kernel takes; results are the same",
            count,
        )
        for why, names, count in _by_reason(slow, lambda m: _reasons(m.lowbit))
    ]


def _llama_cpp(modules: Sequence[ModulePlan]) -> list[Advice]:
    odd = [m for m in modules if m.llama_cpp.declined]
    return [
        Advice(
            f"llama.cpp's K-quants cannot hold {names}: {why}",
            "nothing for a checkpoint; in a GGUF file these tensors take the types of 32 columns",
            count,
        )
        for why, names, count in _by_reason(
            odd, lambda m: next(iter(m.llama_cpp.declined.values()))
        )
    ]


def _tied(foresight: Foresight, tied_bytes: int) -> list[Advice]:
    share = tied_bytes / max(1, foresight.totals.tensor_bytes)
    if share < TIED_SHARE:
        return []
    return [
        Advice(
            f"the embedding is the output head too and stays as it is: {tied_bytes / 1e6:.1f} MB, "
            f"{share:.0%} of the output",
            "nothing in a checkpoint; `quantize export` stores it in fewer bits in a GGUF file",
        )
    ]


def _by_reason(
    modules: Sequence[ModulePlan], reason: Callable[[ModulePlan], str]
) -> list[tuple[str, str, int]]:
    """(reason, the linears' names, how many), the commonest first."""
    by_reason: dict[str, list[str]] = {}
    for module in modules:
        by_reason.setdefault(reason(module), []).append(module.name)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [(why, _names(_leaves(names)), len(names)) for why, names in ordered]


def _reasons(answer: object) -> str:
    declined = getattr(answer, "declined", {})
    return "; ".join(f"{name} {why}" for name, why in declined.items())


def _leaves(names: Sequence[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names]


def _names(leaves: Sequence[str]) -> str:
    """The commonest of the names, with how often each stands there."""
    counts = Counter(leaves).most_common()
    shown = [f"{n} {leaf}" if n > 1 else leaf for leaf, n in counts[:SHOWN]]
    more = sum(n for _, n in counts[SHOWN:])
    return ", ".join(shown) + (f" and {more} more" if more else "")
