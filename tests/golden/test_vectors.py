"""S1, S2: roots, preimages, digests, extra keys and index keys equal the recorded ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import vectors

DATA = Path(__file__).parent / "data" / "hash_vectors.json"


def test_s1_committed_vectors_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """All four algorithms give the recorded bytes, alone and in a pool."""
    assert vectors.main([str(DATA)]) == 0
    assert capsys.readouterr().out == (
        "20 roots, 76 vectors (216 blocks), 3 group keys: all equal; "
        "0 lookahead vectors not checked\n"
    )


def test_s1_all_recorded_vectors_are_equal(
    shared_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole recording is equal."""
    assert vectors.main([str(shared_folder / "golden" / "hash_vectors.json")]) == 0
    assert "152 vectors" in capsys.readouterr().out


def flip(text: str) -> str:
    """Changes the first hexadecimal digit."""
    return ("1" if text[0] == "0" else "0") + text[1:]


def change_root(document: Any) -> None:
    """Records another root."""
    document["none_hash"][0]["none_hash"] = flip(document["none_hash"][0]["none_hash"])


def change_hash(document: Any) -> None:
    """Records another digest."""
    block = document["vectors"][0]["blocks"][1]
    block["hash"] = flip(block["hash"])


def change_preimage(document: Any) -> None:
    """Records other bytes."""
    block = document["vectors"][0]["blocks"][0]
    block["preimage_hex"] = flip(block["preimage_hex"])


def change_extra_keys(document: Any) -> None:
    """Records an extra key where there is none."""
    document["vectors"][0]["blocks"][0]["extra_keys"] = [["cache_salt", "x"]]


def change_group_key(document: Any) -> None:
    """Records another index key."""
    document["group_keys"][2]["index_key"] = flip(document["group_keys"][2]["index_key"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_root, "none_hash[0]: root digest"),
        (change_hash, "vectors[0] (sha256, count_plain): digest of block 1"),
        (change_preimage, "vectors[0] (sha256, count_plain): preimage of block 0"),
        (change_extra_keys, "vectors[0] (sha256, count_plain): extra keys of block 0"),
        (change_group_key, "group_keys[2]: index key"),
    ],
)
def test_first_different_vector_is_said_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    """Any kind of difference is found and said with what was expected and what came."""
    document = json.loads(DATA.read_text())
    change(document)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(document))
    assert vectors.main([str(path)]) == 1
    output = capsys.readouterr().out
    assert output.startswith(said)
    assert "expected:" in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "not JSON"),
        ("[]", "expected an object"),
        ('{"none_hash": [], "vectors": []}', "no field 'group_keys'"),
        ('{"none_hash": [1], "vectors": [], "group_keys": []}', "none_hash[0]"),
        (
            '{"none_hash": [{"algo": "md5"}], "vectors": [], "group_keys": []}',
            "unknown hash algorithm 'md5'",
        ),
    ],
)
def test_bad_vector_file_gives_one_line_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """A file of another shape is no difference and no traceback."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert vectors.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
