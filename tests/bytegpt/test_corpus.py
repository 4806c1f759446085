import hashlib
from pathlib import Path

import pytest

from examples.bytegpt.data import CorpusError, read_corpus, source_files


def write(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_the_parts_are_the_bytes_of_sorted_files_with_every_third_held_out(tmp_path):
    write(tmp_path, ["b.py", "a.py", "pkg/c.py", "z.py", "d.py", "e.py", "notes.txt"])

    corpus = read_corpus(str(tmp_path), held_out_every=3)

    # Sorted: a b d | e pkg/c z, with d and z held out.
    assert corpus.train.data.tobytes() == b"# a.py\n# b.py\n# e.py\n# pkg/c.py\n"
    assert corpus.held_out.data.tobytes() == b"# d.py\n# z.py\n"
    assert (corpus.train.num_files, corpus.held_out.num_files) == (4, 2)
    assert corpus.held_out.sha256 == hashlib.sha256(b"# d.py\n# z.py\n").hexdigest()


def test_tests_caches_installed_packages_and_generated_files_are_left_out(tmp_path):
    kept = ["a.py", "testing_tools.py", "unittest/case.py"]
    left_out = [
        "test/test_a.py",
        "lib/tests/test_b.py",
        "idlelib/idle_test/x.py",
        "site-packages/numpy.py",
        "dist-packages/apt.py",
        "__pycache__/a.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x86_64/python-config.py",
    ]
    write(tmp_path, kept + left_out)

    assert [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)] == kept


def test_the_standard_library_is_read_without_its_tests():
    corpus = read_corpus("stdlib", held_out_every=20)

    assert corpus.train.data.size > 5_000_000
    assert corpus.held_out.data.size > 100_000
    assert corpus.fingerprint == read_corpus("stdlib", held_out_every=20).fingerprint


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"missing' does not exist.*data\.corpus"):
        read_corpus(str(tmp_path / "missing"), held_out_every=2)


def test_a_file_is_no_corpus_directory(tmp_path):
    write(tmp_path, ["a.py"])

    with pytest.raises(CorpusError, match=r"a\.py' is a file"):
        read_corpus(str(tmp_path / "a.py"), held_out_every=2)


def test_a_directory_without_source_says_what_it_lacks(tmp_path):
    write(tmp_path, ["notes.txt"])

    with pytest.raises(CorpusError, match=r"has 0 \.py file\(s\) outside test directories; held_out_every=2 leaves none"):
        read_corpus(str(tmp_path), held_out_every=2)


def test_too_few_files_to_hold_one_out_are_listed(tmp_path):
    write(tmp_path, ["a.py", "b.py"])

    with pytest.raises(CorpusError, match=r"'a\.py', 'b\.py'; held_out_every=20 leaves none to hold out"):
        read_corpus(str(tmp_path), held_out_every=20)


def test_a_file_that_cannot_be_read_is_named_and_not_skipped(tmp_path, monkeypatch):
    write(tmp_path, ["a.py", "b.py"])

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)

    with pytest.raises(CorpusError, match=r"a\.py' of the corpus cannot be read: Permission denied"):
        read_corpus(str(tmp_path), held_out_every=2)
