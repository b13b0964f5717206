"""Tokenizers: Hugging Face's files to GGUF's metadata and back; llama.cpp's own test vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf import pretokenizers, vocab
from lowbit.quantize.gguf.hf_tokenizer import build_tokenizer, write_tokenizer
from lowbit.quantize.gguf.hf_vocab import read_vocab
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.gguf.spm_model import read_spm_model
from lowbit.quantize.gguf.vocab import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, Vocab
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .gguf_models import MERGES, merging_tokenizer, shared_data

VECTORS = ["llama-spm", "llama-bpe", "gpt-2", "qwen2", "phi-3", "starcoder", "deepseek-coder"]
TEXTS = ["the thing in 33 3333", " a  b\n\n2", "<think>the<s>", "\u00e9 \U0001f680", ""]


def gguf_vocab(name: str) -> Path:
    return shared_data() / "tokenizers" / "gguf-vocab" / f"ggml-vocab-{name}.gguf"


def saved(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> Path:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or merging_tokenizer(), bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def sentencepiece_tokenizer() -> Tokenizer:
    """BPE with byte fallback and sentencepiece's space."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    merges = [("t", "h"), ("\u2581", "th"), ("\u2581th", "e"), ("i", "n")]
    pieces += ["\u2581", "t", "h", "e", "i", "n", *("".join(m) for m in merges)]
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("name", VECTORS)
def test_rebuilt_tokenizer_passes_llama_cpp_s_vectors(name: str) -> None:
    path = gguf_vocab(name)
    tokenizer = build_tokenizer(vocab.from_keys(GGUFFile(path).keys))
    texts = path.with_name(path.name + ".inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = [int(i) for i in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "gpt-2", "qwen2"])
def test_folder_gives_the_file_s_metadata(name: str) -> None:
    """The folders were made from these files by other code, so both directions are held to it."""
    stored = vocab.from_keys(GGUFFile(gguf_vocab(name)).keys)
    folder = shared_data() / "tokenizers" / f"{name}-hf"
    read = read_vocab(folder, {"vocab_size": len(stored.tokens)})
    for field in ("model", "pre", "tokens", "types", "scores", "merges", "add_bos", "add_eos"):
        assert getattr(read, field) == getattr(stored, field), field
    for role in ("bos", "eos"):
        assert read.special[role] == stored.special[role]
    assert read.add_space_prefix == stored.add_space_prefix


def test_scores_without_tokenizer_model_tokenize_alike(tmp_path: Path) -> None:
    folder = shared_data() / "tokenizers" / "llama-spm-hf"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    read = read_vocab(tmp_path, {"vocab_size": 32000})
    assert read.scores is not None
    assert read.scores != read_vocab(folder, {"vocab_size": 32000}).scores
    rebuilt, original = build_tokenizer(read), Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (shared_data() / "wikitext-2" / "test.txt").read_text()[:40000]
    assert rebuilt.encode(text).ids == original.encode(text).ids


def test_tokenizer_model_alone_is_enough(tmp_path: Path) -> None:
    folder = shared_data() / "stories260k"
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    alone, both = (read_vocab(f, {"vocab_size": 512}) for f in (tmp_path, folder))
    assert alone == both
    assert (alone.add_bos, alone.add_space_prefix, alone.model) == (True, True, "llama")
    assert alone.types.count(BYTE) == 256


def test_tokenizer_model_is_read_as_sentencepiece_reads_it() -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    path = shared_data() / "tokenizers" / "llama-spm-hf" / "tokenizer.model"
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = read_spm_model(path)
    ids = range(theirs.get_piece_size())
    assert ours.pieces == [theirs.id_to_piece(i) for i in ids]
    assert ours.scores == [theirs.get_score(i) for i in ids]
    assert [i for i in ids if ours.types[i] == BYTE] == [i for i in ids if theirs.is_byte(i)]
    assert [i for i in ids if ours.types[i] == CONTROL] == [i for i in ids if theirs.is_control(i)]


@pytest.mark.parametrize("damage", [b"", b"\x0a\xff\xff", b"no model", b"\x12\x02\x18\x01"])
def test_damaged_tokenizer_model(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(damage)
    with pytest.raises(UserError, match=r"tokenizer\.model"):
        read_spm_model(tmp_path / "tokenizer.model")


def test_byte_level_round_trip(tmp_path: Path) -> None:
    original = merging_tokenizer()
    first = len(pre_tokenizers.ByteLevel.alphabet()) + len(MERGES)
    read = read_vocab(saved(tmp_path / "a"), {"vocab_size": first + 6})
    assert (read.model, read.pre, read.scores) == ("gpt2", "gpt-2", None)
    assert read.merges == [f"{a} {b}" for a, b in MERGES]
    assert read.tokens[first:] == ["<s>", "</s>", "<pad>", "<think>", "[PAD266]", "[PAD267]"]
    kinds = [CONTROL, CONTROL, CONTROL, USER_DEFINED, UNUSED, UNUSED]
    assert read.types == [NORMAL] * first + kinds
    assert read.special == {"bos": first, "eos": first + 1}
    again = vocab.from_keys(vocab.to_keys(read))
    assert again == read
    rebuilt = build_tokenizer(again)
    assert rebuilt.get_vocab_size() == first + 4
    for text in TEXTS:
        assert rebuilt.encode(text).ids == original.encode(text).ids
        ids = original.encode(text).ids
        assert rebuilt.decode(ids) == original.decode(ids)


def test_sentencepiece_round_trip(tmp_path: Path) -> None:
    original = sentencepiece_tokenizer()
    rows = original.get_vocab_size()
    read = read_vocab(saved(tmp_path / "a", original), {"vocab_size": rows})
    assert (read.model, read.pre, read.merges) == ("llama", "default", None)
    assert (read.add_bos, read.add_eos, read.add_space_prefix) == (True, False, True)
    rebuilt = build_tokenizer(vocab.from_keys(vocab.to_keys(read)))
    for text in TEXTS:
        assert rebuilt.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize("setting", [True, False])
def test_add_bos_as_set(tmp_path: Path, setting: bool) -> None:
    folder = saved(tmp_path / "a", add_bos_token=setting, add_eos_token=not setting)
    read = read_vocab(folder, {"vocab_size": 300})
    assert (read.add_bos, read.add_eos) == (setting, not setting)
    ids = build_tokenizer(read).encode("in").ids
    assert (ids[0] == read.special["bos"]) == setting
    assert (ids[-1] == read.special["eos"]) != setting


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    ends = json.dumps({"eos_token_id": [263, 264, 265]})
    (folder / "generation_config.json").write_text(ends)
    read = read_vocab(folder, {"vocab_size": 300, "pad_token_id": 264})
    assert read.special == {"bos": 262, "eos": 263, "eot": 264, "eom": 265, "padding": 264}
    assert vocab.from_keys(vocab.to_keys(read)).end_ids == [263, 264, 265]
    ends = json.dumps({"eos_token_id": [263, 264, 265, 0]})
    (folder / "generation_config.json").write_text(ends)
    with pytest.raises(UserError, match="4 end tokens"):
        read_vocab(folder, {"vocab_size": 300})


def test_chat_templates_from_everywhere(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "A"}, {"name": "tool", "template": "B"}]
    folder = saved(tmp_path / "a", chat_template=listed)
    assert read_vocab(folder, {"vocab_size": 300}).chat_templates == {"default": "A", "tool": "B"}
    (folder / "chat_template.jinja").write_text("C")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("D")
    read = read_vocab(folder, {"vocab_size": 300})
    assert read.chat_templates == {"default": "C", "tool": "B", "rag": "D"}
    again = vocab.from_keys(vocab.to_keys(read))
    assert again.chat_templates == read.chat_templates
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(again, out, 256)
    assert read_vocab(out, {"vocab_size": 300}).chat_templates == read.chat_templates


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", add_bos_token=True, chat_template="{{ messages[0].content }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [263, 265]}))
    read = read_vocab(folder, {"vocab_size": 300})
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(read, out, 256)
    loaded = AutoTokenizer.from_pretrained(out)
    assert (loaded.bos_token, loaded.eos_token, loaded.model_max_length) == ("<s>", "</s>", 256)
    assert loaded("the<s>in").input_ids == [262, *merging_tokenizer().encode("the<s>in").ids]
    assert loaded.decode(loaded("the in").input_ids, skip_special_tokens=True) == "the in"
    message = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(message, tokenize=False) == "hi"
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 262, "eos_token_id": [263, 265]}


@pytest.mark.parametrize("name", pretokenizers.PRE_TOKENIZERS)
def test_parts_name_the_pre_tokenizer(name: str) -> None:
    """What `build` makes for a name is recognised by its parts (several names share theirs)."""
    cut, ignore_merges = pretokenizers.build(name)
    tokenizer = merging_tokenizer()
    tokenizer.model = models.BPE(
        tokenizer.get_vocab(with_added_tokens=False), MERGES, ignore_merges=ignore_merges
    )
    tokenizer.pre_tokenizer = cut
    found = pretokenizers.identify(tokenizer)
    assert pretokenizers.PRE_TOKENIZERS[found] == pretokenizers.PRE_TOKENIZERS[name]


def test_hash_comes_before_parts() -> None:
    """The ids of the check text decide, as in llama.cpp's converter, even with parts reworded."""
    path = shared_data() / "tokenizers" / "qwen2-hf" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    assert pretokenizers.identify(tokenizer) == "qwen2"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    reworded = pre_tokenizers.Split(Regex(f"(?:{pretokenizers.QWEN2})"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([reworded, byte_level])
    assert pretokenizers.describe(json.loads(tokenizer.to_str())) not in (
        pretokenizers.PRE_TOKENIZERS.values()
    )
    assert pretokenizers.identify(tokenizer) == "qwen2"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
        lambda t: setattr(
            t,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\d{2}"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        ),
    ],
    ids=["prefix space", "lowercase", "foreign pattern"],
)
def test_unknown_pre_tokenizer_fails_unless_named(tmp_path: Path, change: Any) -> None:
    tokenizer = merging_tokenizer()
    change(tokenizer)
    folder = saved(tmp_path / "a", tokenizer)
    with pytest.raises(UserError, match="--pre"):
        read_vocab(folder, {"vocab_size": 300})
    assert read_vocab(folder, {"vocab_size": 300}, pre="gpt-2").pre == "gpt-2"


def test_tokenizers_without_counterpart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        read_vocab(tmp_path, {"vocab_size": 300})
    with pytest.raises(UserError, match="only 200 rows"):
        read_vocab(saved(tmp_path / "big"), {"vocab_size": 200})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match="damaged"):
        read_vocab(tmp_path / "broken", {"vocab_size": 300})
    unigram = Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0))
    with pytest.raises(UserError, match="Unigram"):
        read_vocab(saved(tmp_path / "unigram", unigram), {"vocab_size": 300})
    lowercase = sentencepiece_tokenizer()
    lowercase.normalizer = normalizers.Sequence([normalizers.Lowercase(), lowercase.normalizer])
    with pytest.raises(UserError, match="Lowercase"):
        read_vocab(saved(tmp_path / "lower", lowercase), {"vocab_size": 300})
    plain = Tokenizer(models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(UserError, match="no merges"):
        read_vocab(saved(tmp_path / "plain", plain), {"vocab_size": 300})


def test_vocabularies_that_llama_cpp_would_abort_on_are_refused() -> None:
    with pytest.raises(UserError, match="tokens 0 and 2"):
        Vocab("gpt2", "gpt-2", ["a", "b", "a"], [NORMAL] * 3, merges=["a b"])
    with pytest.raises(UserError, match="outside the 2 tokens"):
        Vocab("llama", "default", ["a", "b"], [NORMAL] * 2, scores=[0, 0], special={"eos": 2})
    with pytest.raises(UserError, match="'t5'"):
        vocab.from_keys({"tokenizer.ggml.model": "t5"})
    with pytest.raises(UserError, match="incomplete"):
        vocab.from_keys({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]})
    unknown = Vocab("gpt2", "falcon", ["a", "b", "ab"], [NORMAL] * 3, merges=["a b"])
    with pytest.raises(UserError, match="'falcon'"):
        build_tokenizer(unknown)


def test_added_tokens_are_typed_as_the_converter_types_them(tmp_path: Path) -> None:
    """Those that tokenizer_config.json lists replace sentencepiece's own; looks can be enough."""
    source = shared_data() / "stories260k"
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    added = {0: ("<unk>", True), 512: ("<|user|>", False), 513: ("\u2581\u2581foo", False)}
    listed = {str(i): {"content": t, "special": special} for i, (t, special) in added.items()}
    settings = {"added_tokens_decoder": listed, "bos_token": "<s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    read = read_vocab(tmp_path, {"vocab_size": 516})
    plain = read_vocab(source, {"vocab_size": 516})
    assert read.scores is not None
    assert plain.scores is not None
    found = [(read.tokens[i], read.types[i], read.scores[i]) for i in (0, 512, 513, 514)]
    assert found == [
        ("<unk>", CONTROL, -1000.0),
        ("<|user|>", CONTROL, -1000.0),
        ("  foo", USER_DEFINED, -1000.0),
        ("[PAD514]", UNUSED, -10000.0),
    ]
    assert (plain.types[0], plain.scores[0]) == (vocab.UNKNOWN, 0.0)
    assert read.tokens[3:512] == plain.tokens[3:512]
    assert read.scores[3:512] == plain.scores[3:512]
    assert read.special == {"bos": 1, "unknown": 0}
