"""Sources of text, their splits and hashes, and token rows cut from them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.calib import hub
from lowbit.calib.text import Text, load_text, load_tokenizer, token_rows, tokenize
from lowbit.kernels.errors import UserError


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained tokenizer to test with")
    return Path(folder)


class Characters:
    """A tokenizer whose tokens are code points, with the interface of transformers'."""

    chat_template: str | None = None

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, text: str, **options: Any) -> Any:
        assert options["add_special_tokens"] is False
        self.longest = max(self.longest, len(text))
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})()


def text_of(characters: str) -> Text:
    return Text(characters, "made up", hashlib.sha256(characters.encode()).hexdigest(), "")


def paragraphs(text: str) -> set[str]:
    return {" ".join(p.split()) for p in text.split("\n\n")}


def test_pydoc_splits_share_no_paragraph_and_leave_nothing_out() -> None:
    from pydoc_data.topics import topics

    calibration, evaluation = load_text("pydoc", "calibration"), load_text("pydoc", "evaluation")
    assert not paragraphs(calibration.text) & paragraphs(evaluation.text)
    words = {w for t in topics.values() for w in t.split()}
    assert words == set(calibration.text.split()) | set(evaluation.text.split())
    assert len(calibration.text) > 2 * len(evaluation.text) > 100_000


def test_pydoc_is_the_same_text_in_another_process() -> None:
    code = "from lowbit.calib.text import load_text; print(load_text('pydoc','evaluation').sha256)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == load_text("pydoc", "evaluation").sha256


def test_a_text_files_hash_is_the_files_own(tmp_path: Path) -> None:
    content = "Zwölf Boxkämpfer\r\njagen.\n".encode()
    (tmp_path / "a.txt").write_bytes(content)
    text = load_text(str(tmp_path / "a.txt"), "evaluation")
    assert text.sha256 == hashlib.sha256(content).hexdigest()
    assert text.text.encode() == content


def test_jsonl_joins_documents_by_a_blank_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one\u2028line"}), "", json.dumps({"text": "two", "id": 3})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert load_text(str(tmp_path / "a.jsonl"), "calibration").text == "one\u2028line\n\ntwo"


def test_jsonl_messages_go_through_the_chat_template(tmp_path: Path, data: Path) -> None:
    tokenizer = load_tokenizer(data / "stories260k")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    file = tmp_path / "chat.jsonl"
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n", encoding="utf-8")
    assert load_text(str(file), "calibration", tokenizer).text == "<user>hi;<assistant>ho;" * 2
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(UserError, match="no such role"):
        load_text(str(file), "calibration", tokenizer)
    with pytest.raises(UserError, match="no chat template"):
        load_text(str(file), "calibration", Characters())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"prompt": "y"}\n', "line 2"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", b'"text"\n', "line 1"),
        ("a.jsonl", b"\n\n", "holds no text"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\t\n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_text(str(tmp_path / name), "calibration")


@pytest.mark.parametrize("source", ["absent.txt", "wikitexts", "some/where/absent.jsonl", ""])
def test_an_unknown_source_is_named(source: str) -> None:
    with pytest.raises(UserError, match=f"no text file '{source}'.*wikitext, pydoc, auto"):
        load_text(source, "evaluation")


def test_wikitext_without_a_hub_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    with pytest.raises(UserError, match="does not answer for 'Salesforce/wikitext'; use pydoc"):
        load_text("wikitext", "calibration")
    auto = load_text("auto", "calibration")
    assert auto.sha256 == load_text("pydoc", "calibration").sha256
    assert "does not answer" in auto.description


def test_offline_mode_is_never_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    monkeypatch.setattr(
        "huggingface_hub.utils.get_session", lambda: pytest.fail("asked for a connection")
    )
    assert not hub.hub_reachable()


def test_an_address_that_nobody_serves_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert not hub.hub_reachable(timeout=1.0)


def test_wikitext_takes_disjoint_splits_and_joins_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(path: str, config: str, split: str, streaming: bool) -> Any:
        assert (path, config, streaming) == ("Salesforce/wikitext", "wikitext-2-raw-v1", False)
        return datasets.Dataset.from_dict({"text": ["", f" = {split} = \n"]})

    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_text("wikitext", "evaluation").text == "\n\n = test = \n"
    calibration = load_text("wikitext", "calibration")
    assert calibration.text == "\n\n = validation = \n\n\n\n\n = train = \n"
    assert load_text("auto", "calibration") == calibration


@pytest.fixture
def dataset_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """A data set in the folder owner/name, with a train and a test split, read by `datasets`."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"text": f"{split} {i}", "title": f"{split} title {i}"} for i in range(3)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "owner/name"


def test_data_set_splits_and_columns(dataset_folder: str) -> None:
    assert load_text(dataset_folder, "calibration").text == "train 0\n\ntrain 1\n\ntrain 2"
    assert load_text(dataset_folder, "evaluation").text == "test 0\n\ntest 1\n\ntest 2"
    titles = load_text(f"{dataset_folder}:test:title", "calibration")
    assert titles.text == "test title 0\n\ntest title 1\n\ntest title 2"
    assert titles.description == "owner/name, split test, column title, first 3 rows"
    with pytest.raises(UserError, match=r"no column 'body' \(columns: text, title\)"):
        load_text(f"{dataset_folder}:test:body", "calibration")
    with pytest.raises(UserError, match="cannot be read"):
        load_text(f"{dataset_folder}:nowhere", "calibration")


def test_a_data_set_is_read_only_so_far(
    dataset_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ROWS_CHARS", 8)
    text = load_text(dataset_folder, "calibration")
    assert text.text == "train 0\n\ntrain 1"
    assert "first 2 rows" in text.description


def test_a_folder_of_plain_text_is_no_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my" / "texts"
    folder.mkdir(parents=True)
    (folder / "story.txt").write_text("one\ntwo\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("my/texts", "my/texts/", str(folder)):
        with pytest.raises(UserError, match="texts/? is a folder, not a text file; name a file"):
            load_text(name, "calibration")
    assert load_text("my/texts/story.txt", "calibration").text == "one\ntwo\n"


def test_a_data_set_without_a_usual_split_asks_for_one(dataset_folder: str) -> None:
    Path(dataset_folder, "test.jsonl").unlink()
    with pytest.raises(UserError, match="no split test or .*; it has train: name one as"):
        load_text(dataset_folder, "evaluation")


@settings(deadline=None)
@given(
    characters=st.text("abc", min_size=1, max_size=200),
    samples=st.integers(1, 8),
    seq_len=st.integers(1, 20),
    seed=st.none() | st.integers(0, 3),
)
def test_token_rows_are_distinct_windows_of_the_text(
    characters: str, samples: int, seq_len: int, seed: int | None
) -> None:
    positions = "".join(chr(i + 1000) for i in range(len(characters)))  # every token its place
    available = len(characters) // seq_len
    if available < samples:
        with pytest.raises(UserError, match=f"holds {available} windows of {seq_len} tokens"):
            token_rows(text_of(positions), Characters(), samples, seq_len, seed)
        return
    rows = token_rows(text_of(positions), Characters(), samples, seq_len, seed)
    assert rows.shape == (samples, seq_len) and rows.dtype == torch.long
    starts = [int(r[0]) - 1000 for r in rows]
    assert all(r.tolist() == list(range(int(r[0]), int(r[0]) + seq_len)) for r in rows)
    assert all(s % seq_len == 0 for s in starts) and len(set(starts)) == samples
    if seed is None:
        assert starts == [i * seq_len for i in range(samples)]


def test_seeds_draw_different_rows_and_the_same_ones_again() -> None:
    text = text_of("".join(chr(i + 1000) for i in range(2000)))
    draw = lambda seed: token_rows(text, Characters(), 8, 4, seed).tolist()  # noqa: E731
    assert draw(0) == draw(0) != draw(1)
    assert draw(0) != token_rows(text, Characters(), 8, 4).tolist()


@pytest.mark.parametrize(("samples", "seq_len"), [(0, 4), (4, 0), (-1, 4)])
def test_row_counts_below_one_are_refused(samples: int, seq_len: int) -> None:
    with pytest.raises(UserError, match="at least 1"):
        token_rows(text_of("abc"), Characters(), samples, seq_len)


def test_a_limit_reads_a_prefix_and_gives_the_same_tokens(data: Path) -> None:
    tokenizer = load_tokenizer(data / "stories260k")
    text = (data / "text" / "tinystories_valid.txt").read_text(encoding="utf-8")
    whole = tokenize(text, tokenizer)
    for limit in (1, 1000, 40_000, len(whole), len(whole) + 9):
        assert torch.equal(tokenize(text, tokenizer, limit), whole[:limit])
    sparse = Characters()
    assert tokenize("x" * 100_000, sparse, 1000).tolist() == [ord("x")] * 1000
    assert sparse.longest < 100_000


def test_a_long_text_draws_no_length_warning(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    tokenizer = load_tokenizer(data / "stories260k")
    text = "Once upon a time. " * 400
    logging.enable_propagation()
    try:
        ids = tokenize(text, tokenizer)
        assert "longer than" not in caplog.text
        tokenizer(text)  # so the warning would have been seen
        assert "longer than" in caplog.text
    finally:
        logging.disable_propagation()
    assert len(ids) > tokenizer.model_max_length
    assert tokenizer.bos_token_id not in ids


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(tmp_path)
