"""What can be wrong with a checkpoint: one table of fault classes, and findings of them.

A class has one severity and one consequence, said of the readers that it concerns: "transformers",
"vLLM", "llama.cpp", "GPTQModel", or "readers" where all do the same. An error makes a checkpoint
not whole; a warning is what it may well have been made with, and should be known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]
SHOWN = 160  # characters of an expected or found value


class FaultClass(NamedTuple):
    """severity and consequence of every fault of a class."""

    severity: Severity
    consequence: str


@dataclass(frozen=True)
class Finding:
    """One fault. fault: a key of FAULTS. where: the tensor or the file. expected, found: in words.
    consequence: what a named reader does with it."""

    severity: Severity
    fault: str
    where: str
    expected: str
    found: str
    consequence: str


def finding(fault: str, where: str, expected: object, found: object) -> Finding:
    """A fault of the class `fault`."""
    severity, consequence = FAULTS[fault]
    return Finding(severity, fault, _short(where), _short(expected), _short(found), consequence)


def _short(value: object) -> str:
    """On one line, without what would steer a terminal: these words come from the checkpoint."""
    words = " ".join(str(value).split())
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _error(consequence: str) -> FaultClass:
    return FaultClass("error", consequence)


def _warning(consequence: str) -> FaultClass:
    return FaultClass("warning", consequence)


FILES: dict[str, FaultClass] = {
    "file missing": _error("readers stop, or load a model that lacks a part"),
    "file changed": _error("the file is not what was written: its tensors may be wrong anywhere"),
    "file not listed": _error("readers load it, and the manifest does not say what it has to be"),
    "file extra": _warning("nothing reads it; it was not there when the checkpoint was written"),
    "damaged file": _error("readers refuse the file, or read bytes that are not its tensors"),
    "pickle": _error("loading it runs the code in it: torch.load would, lowbit and vLLM refuse"),
    "link out of the folder": _error("readers open a file that is not part of the checkpoint"),
    "JSON": _error("transformers and vLLM stop at the file, or a reader runs out of memory"),
    "index": _error("transformers and vLLM look tensors up there: those that differ are not found"),
    "no index": _error("transformers finds no weights: several shards need an index"),
    "tensor twice": _error("readers take one of the two, not all the same one"),
    "index size": _warning("programs that plan memory by metadata.total_size plan wrongly"),
}
CONFIG: dict[str, FaultClass] = {
    "no config": _error("transformers and vLLM do not know what model it is"),
    "layout": _error("lowbit, and most other readers, do not know how the weights are stored"),
    "config": _error("readers refuse the quantization_config, or take weights for others"),
    "config key": _error("compressed-tensors refuses the key, so transformers and vLLM stop"),
    "config key ignored": _warning("transformers and vLLM do not know the key and go on without"),
    "config missing key": _error("vLLM stops: it wants the key"),
    "configs disagree": _error("GPTQModel reads the one file, transformers and vLLM the other"),
    "quantization status": _warning("transformers takes codes for weights; vLLM does not ask"),
    "reader limit": _warning("the named program refuses it, in that place; lowbit reads it"),
    "targeted, not quantized": _error("transformers and vLLM expect codes and find a float weight"),
    "left alone, but quantized": _error("transformers and vLLM expect a float weight, not codes"),
    "model unknown": _warning("transformers cannot build it, so names and shapes are not checked"),
}
TENSORS: dict[str, FaultClass] = {
    "missing tensor": _error("transformers fills it with random numbers, vLLM and lowbit stop"),
    "extra tensor": _error("vLLM and lowbit stop: the model has no place for it"),
    "shape": _error("readers stop at the tensor, or read its numbers in the wrong places"),
    "dtype": _error("readers stop at the tensor, or take its bytes for other numbers"),
    "older packing": _warning("compressed-tensors reads 3, 5, 6 and 7 bits packed densely only"),
    "tied tensors differ": _error("transformers keeps one of the two, vLLM may keep the other"),
    "fused peers": _error("vLLM runs them as one linear and refuses, or uses one's values for all"),
    "fused peers' scales": _warning("vLLM takes the larger scale for all and loses some accuracy"),
}
VALUES: dict[str, FaultClass] = {
    "scale not finite": _error("every output of the linear becomes NaN"),
    "scale zero": _error("the group's weights all read as zero, whatever their codes"),
    "scale not positive": _error("readers refuse it, or every output of the linear is wrong"),
    "value not finite": _error("every output that it touches becomes NaN"),
    "code range": _error("vLLM's kernels read other numbers than transformers"),
    "zero-point range": _error("readers wrap the zero-point: its whole group is off by 2^bits"),
    "symmetric zero-point": _error("vLLM ignores the zero-points of symmetric linears: it is off"),
    "value too large": _error(
        "beyond float16, and products of it are infinite: outputs become NaN"
    ),
    "g_idx order": _error("vLLM ignores g_idx unless desc_act is true: columns get other scales"),
    "g_idx range": _error("readers fetch scales from outside the tensor, or crash"),
    "packing": _error("the words cannot be unpacked into the weight's codes"),
    "padding bits": _warning("a word's unused bits are not zero: another program packed it"),
    "GPTQ label": _error("readers that believe the label are one off at every zero-point"),
    "AWQ order": _error("readers take each eight outputs in another order: the model talks noise"),
    "uncalibrated scales": _warning("values beyond the format's range are cut: nobody measured it"),
    "all zero": _warning("the matrix adds nothing: a writer that was killed leaves such holes"),
}
SIDE_FILES: dict[str, FaultClass] = {
    "tokenizer lost": _error("vLLM and transformers cannot turn text into tokens"),
    "tokenizer absent": _warning("vLLM needs --tokenizer, transformers the original model"),
    "tokenizer damaged": _error("vLLM and transformers stop when they load the tokenizer"),
    "tokenizer size": _error("ids beyond the embedding crash the model"),
    "token id": _error("the model never produces it, so that no answer ends, or it cannot be read"),
    "chat template lost": _error("vLLM's chat endpoint refuses, or prompts lose their form"),
    "chat template absent": _warning("vLLM's chat endpoint refuses without --chat-template"),
    "generation config lost": _error("vLLM samples otherwise, and may miss the end of an answer"),
    "generation config absent": _warning("stop tokens and sampling come from config.json alone"),
    "custom code lost": _error("transformers with trust_remote_code stops: its module is missing"),
}
GGUF: dict[str, FaultClass] = {
    "GGUF container": _error("llama.cpp refuses the file, or reads past its end"),
    "GGUF part": _error("llama.cpp refuses the file: it wants all of its parts, each in its place"),
    "GGUF key": _error("llama.cpp refuses the file, or computes NaN: it wants the key"),
    "GGUF version": _warning("llama.cpp may read the blocks by an older layout"),
    "GGUF tensor missing": _error("llama.cpp refuses the file: a layer lacks the tensor"),
    "GGUF shape": _error("llama.cpp refuses the file: the tensor is not what the keys say"),
    "GGUF import": _warning("lowbit does not import it; llama.cpp may run it"),
    "GGUF tokenizer": _error("llama.cpp refuses the vocabulary, or its ids are those of others"),
    "GGUF pre-tokenizer": _warning("llama.cpp cuts text in its default way: other tokens come out"),
    "GGUF block": _error("every weight of the block becomes NaN or wrong: the model talks noise"),
    "GGUF attention": _warning("llama.cpp attends to values and sums keys: the model talks noise"),
    "GGUF trailing bytes": _warning("llama.cpp ignores them"),
}
AGAINST: dict[str, FaultClass] = {
    "changed tensor": _error("a tensor that is not quantized differs from the original's"),
    "outlier": _error("the tensor is much further from the original than others of its role"),
    "unexplained error": _error("single weights are damaged, or are those of another tensor"),
    "transformed": _warning("its recipe rescales weights: what differs by design is not compared"),
    "not compared": _warning("whether these tensors are the original's has not been looked at"),
    "not in the original": _warning("nothing in the original to compare it with"),
}
FAULTS: dict[str, FaultClass] = {
    **FILES, **CONFIG, **TENSORS, **VALUES, **SIDE_FILES, **GGUF, **AGAINST,
}  # fmt: skip
