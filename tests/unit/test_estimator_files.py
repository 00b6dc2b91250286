"""Estimators on files: read by part, each row once; bad input named by column and file."""

from __future__ import annotations

import csv
import tracemalloc

import numpy as np
import pytest
from sklearn.base import clone

import unisono as un
from unisono.estimators import Files, LeastSquares, LogisticRegression, formats
from unisono.tables.estimators.formats import find_format

NAMES = ["size", "rooms", "price"]


def data(rows=60, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 2)) * [100, 1] + [500, 3]
    return np.column_stack([x, x @ [0.5, -7.0] + 10.0])


def write_csv(path, rows, names=NAMES, *, end="\n"):
    lines = [",".join(names)] if names else []
    lines += [",".join(f"{value:.17g}" for value in row) for row in rows]
    path.write_bytes((end.join(lines) + end).encode())
    return str(path)


def write_npy(path, rows, names=NAMES):
    np.save(path, rows)
    return str(path)


def write_fortran_npy(path, rows, names=NAMES):
    np.save(path, np.asfortranarray(rows.astype(np.float32)))
    return str(path)


def write_parquet(path, rows, names=NAMES):
    pa = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({name: rows[:, i] for i, name in enumerate(names)}), path, row_group_size=7)
    return str(path)


FORMATS = [("csv", write_csv), ("npy", write_npy), ("npy", write_fortran_npy), ("parquet", write_parquet)]
EACH = pytest.mark.parametrize(("ending", "write"), FORMATS, ids=["csv", "npy", "npy-fortran", "parquet"])


def rows_of(plan, size):
    read_blocks = [block for rank in range(size) for block in plan.part(rank, size).read_blocks()]
    return np.concatenate([np.column_stack([block.x, block.y]) for block in read_blocks])


@EACH
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("piece_bytes", [50, 333, 1 << 20])
def test_every_row_comes_once_whatever_the_pieces(tmp_path, ending, write, size, piece_bytes):
    whole = data()
    write(tmp_path / f"part-0.{ending}", whole[:35])
    write(tmp_path / f"part-1.{ending}", whole[35:])
    target = "price" if ending != "npy" else -1
    plan = Files(tmp_path / f"part-*.{ending}", target=target, piece_bytes=piece_bytes).plan()
    np.testing.assert_allclose(rows_of(plan, size), whole, rtol=1e-6)


@EACH
@pytest.mark.parametrize("size", [1, 3])
def test_files_give_the_same_model_as_arrays(tmp_path, ending, write, size):
    whole = data().astype(np.float32).astype(np.float64)
    write(tmp_path / f"a.{ending}", whole[:10])
    write(tmp_path / f"b.{ending}", whole[10:])
    target = "price" if ending != "npy" else 2
    arrays = LeastSquares().fit(whole[:, :2], whole[:, 2])

    def fit(_):
        files = Files(tmp_path, target=target, piece_bytes=200, keep_bytes=1000)
        return LeastSquares(speedup=False).fit(files), LeastSquares(solver="lbfgs", speedup=False).fit(files)

    for models in un.run_threads(fit, size):
        for model in models:
            np.testing.assert_allclose(model.coef_, arrays.coef_, rtol=1e-6)
            assert model.n_features_in_ == 2
            assert model.n_rows_ == 60
    np.testing.assert_allclose(models[0].predict(tmp_path), arrays.predict(whole[:, :2]), rtol=1e-6)
    names = getattr(models[0], "feature_names_in_", None)
    assert (names is None) if ending == "npy" else list(names) == NAMES[:2]


def test_one_line_with_a_pattern_and_the_name_of_a_column(tmp_path):
    path = write_csv(tmp_path / "a.csv", data())
    model = LeastSquares().fit(path, "price")
    np.testing.assert_allclose(model.coef_, [0.5, -7.0], rtol=1e-8)
    np.testing.assert_allclose(model.predict(path), data()[:, 2], rtol=1e-8)
    grown = LeastSquares().partial_fit(path, "price").partial_fit(path, "price")
    np.testing.assert_allclose(grown.coef_, [0.5, -7.0], rtol=1e-8)
    assert grown.n_rows_ == 120


def test_an_fsspec_address_is_read_like_a_path():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    whole = data()
    for i in range(3):
        text = (
            ",".join(NAMES) + "\n" + "\n".join(",".join(map(repr, row)) for row in whole[20 * i : 20 * i + 20].tolist())
        )
        system.pipe(f"/housing/part-{i}.csv", text.encode())
    try:
        for paths in (
            "memory://housing/part-*.csv",
            "memory://housing",
            [f"memory://housing/part-{i}.csv" for i in range(3)],
        ):
            model = LeastSquares().fit(Files(paths, target="price", piece_bytes=100))
            np.testing.assert_allclose(model.coef_, [0.5, -7.0], rtol=1e-8)
            assert model.n_rows_ == 60
        with pytest.raises(FileNotFoundError, match="memory://nowhere"):
            Files("memory://nowhere.csv", target="price").plan()
    finally:
        system.rm("/housing", recursive=True)


def test_classes_weights_and_chosen_columns(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 2))
    y = (x[:, 0] + 0.5 * rng.standard_normal(300) > 0) * 1.0 + 2.0
    weight = rng.uniform(0.5, 2, 300)
    path = write_csv(tmp_path / "a.csv", np.column_stack([x, y, weight]), ["u", "v", "kind", "w"])
    files = Files(path, target="kind", weight="w", columns=["v", "u"], piece_bytes=2000)
    model = LogisticRegression(l2=0.01, tol=1e-9).fit(files)
    arrays = LogisticRegression(l2=0.01, tol=1e-9).fit(x[:, ::-1], y, weight)
    np.testing.assert_allclose(model.coef_, arrays.coef_, rtol=1e-5)
    assert model.classes_.tolist() == [2, 3]
    assert list(model.feature_names_in_) == ["v", "u"]


def test_headers_may_be_missing_and_lines_may_end_in_any_way(tmp_path):
    whole = data()
    path = write_csv(tmp_path / "a.csv", whole, None, end="\r\n")
    np.testing.assert_allclose(rows_of(Files(path, target=2, piece_bytes=100).plan(), 2), whole)
    path = write_csv(tmp_path / "b.csv", whole)
    (tmp_path / "b.csv").write_bytes((tmp_path / "b.csv").read_bytes().rstrip(b"\n"))
    np.testing.assert_allclose(rows_of(Files(path, target="price", piece_bytes=100).plan(), 3), whole)


def test_line_breaks_inside_quotes_are_no_ends_of_rows(tmp_path):
    """Against `csv.reader`, for pieces of every size: quoted line breaks, doubled quotes, quotes that are mere text."""
    random = np.random.default_rng(0)
    notes = ["plain", "two\nlines", 'a "word"', "x,y\r\nz", "", '\n"\n"', "1,2,3\n4,5,6"]
    for stray in (False, True):
        path = tmp_path / f"{stray}.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            file.write('size,"what it\nis",price\n')
            for i in range(60):
                note = '"' + notes[random.integers(len(notes))].replace('"', '""') + '"'
                note = '12 inch" é' if stray and i % 3 == 0 else note
                file.write(f"{i},{note},{2 * i + 1}\n" + "\n" * (i % 7 == 0))
        with open(path, newline="", encoding="utf-8") as file:
            expected = [[float(row[0]), float(row[2])] for row in list(csv.reader(file))[1:] if row]
        assert len(expected) == 60
        for piece_bytes in (1, 7, 30, 100, 10_000):
            plan = Files(path, columns=["size"], target="price", piece_bytes=piece_bytes).plan()
            assert len(plan.pieces) > 1 or piece_bytes == 10_000
            for workers in (1, 3):
                np.testing.assert_array_equal(rows_of(plan, workers), expected)


def test_a_name_with_a_line_break_after_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"a\nb",y\n1,2\n3,4\n', encoding="utf-8-sig")
    for piece_bytes in (1, 5, 100):
        plan = Files(path, target="y", piece_bytes=piece_bytes).plan()
        assert plan.features == ["a\nb"]
        assert rows_of(plan, 2).tolist() == [[1, 2], [3, 4]]


def test_errors_name_the_line_also_after_line_breaks_inside_quotes(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text('x,"no\nte",y\n1,"a\nb",2\n\n3,"c\nd",many\n')
    for piece_bytes in (1, 12, 1000):
        with pytest.raises(ValueError, match=r"a\.csv, line 6: column 'y' has 'many'"):
            LeastSquares().fit(Files(path, columns=["x"], target="y", piece_bytes=piece_bytes))
    path.write_text('x,y\n1,2\n"3,4\n' + "5,6\n" * 40)
    monkeypatch.setattr(formats, "_MAX_RECORD_BYTES", 50)
    with pytest.raises(ValueError, match=r"a\.csv, line 3 continues for \d+ bytes: a quote is not closed"):
        Files(path, target="y", piece_bytes=10).plan()


def test_one_rank_of_a_world_looks_for_the_ends_of_rows(tmp_path, monkeypatch):
    path, cuts = write_csv(tmp_path / "a.csv", data()), []
    csv_format = find_format(path)
    real = type(csv_format).cut_pieces
    monkeypatch.setattr(type(csv_format), "cut_pieces", lambda self, *args: cuts.append(1) or real(self, *args))
    found = un.run_threads(lambda _: LeastSquares().fit(Files(path, target="price", piece_bytes=100)).coef_, 3)
    assert len(cuts) == 1
    for coef in found:
        np.testing.assert_allclose(coef, [0.5, -7.0], rtol=1e-8)


def test_only_what_fits_is_kept_in_memory(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "a.csv", data(400))
    reads = []
    csv = find_format(path)
    real = type(csv).read
    monkeypatch.setattr(type(csv), "read", lambda self, piece, columns: reads.append(1) or real(self, piece, columns))
    for keep_bytes, expected in ((1 << 20, 1), (0, 3)):
        table = Files(path, target="price", piece_bytes=4000, keep_bytes=keep_bytes).plan().part(0, 1)
        reads.clear()
        for _ in range(3):
            for _ in table.read_blocks():
                pass
        assert len(reads) == expected * len(table.pieces)
        assert len(table.pieces) > 3


# Bad input ---------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("solver", ["normal", "lbfgs"])
def test_a_missing_value_is_named_by_column_and_file(tmp_path, ending, write, solver):
    whole = data()
    whole[41, 1] = np.nan
    write(tmp_path / f"a.{ending}", whole[:30])
    write(tmp_path / f"b.{ending}", whole[30:])
    column = "'rooms'" if ending != "npy" else "1"
    describe_place = {"csv": "line 13", "npy": "row 11", "parquet": "row 11"}[ending]
    files = Files(tmp_path, target="price" if ending != "npy" else 2, piece_bytes=150)

    def fit(_):
        with pytest.raises(ValueError, match=rf"NaN .*column {column} \(.*b\.{ending}, {describe_place}\)"):
            LeastSquares(solver=solver).fit(files)
        return True

    assert un.run_threads(fit, 2) == [True, True]
    files.missing = "drop"
    model = LeastSquares(solver=solver).fit(files)
    assert model.n_rows_ == 59
    np.testing.assert_allclose(model.coef_, [0.5, -7.0], rtol=1e-4)


def test_empty_fields_are_missing_and_inf_after_dropped_rows_keeps_its_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,2\n,3\nNA,4\n2,inf\n")
    with pytest.raises(ValueError, match=r"X contains NaN .*'x' \(.*a\.csv, line 3\)"):
        LeastSquares().fit(path, "y")
    with pytest.raises(ValueError, match=r"y contains infinity .*a\.csv, line 5"):
        LeastSquares().fit(Files(path, target="y", missing="drop"))


def test_unequal_columns_are_named(tmp_path):
    a = write_csv(tmp_path / "a.csv", data())
    write_csv(tmp_path / "b.csv", data(), ["size", "price", "garden"])
    with pytest.raises(ValueError, match=r"compared with .*a\.csv, .*b\.csv lacks 'rooms' and adds 'garden'"):
        LeastSquares().fit(tmp_path, "price")
    np.save(tmp_path / "c.npy", data()[:, :2])
    with pytest.raises(ValueError, match=r"differ: .*a\.csv has 3, .*c\.npy has 2"):
        LeastSquares().fit([a, tmp_path / "c.npy"], "price")


def test_columns_in_another_order_are_found_by_name(tmp_path):
    whole = data()
    write_csv(tmp_path / "a.csv", whole[:30])
    write_csv(tmp_path / "b.csv", whole[30:, [2, 0, 1]], ["price", "size", "rooms"])
    np.testing.assert_allclose(LeastSquares().fit(tmp_path, "price").coef_, [0.5, -7.0], rtol=1e-8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x,y\n1,2\nhello,3\n", r"a\.csv, line 3: column 'x' has 'hello', expected a number"),
        ("x,y\n1,2\n3\n", r"a\.csv, line 3 has 1 fields, expected 2"),
        ("", r"a\.csv is empty"),
        ("x,y\n", "no rows"),
        ("y\n1\n", "no column is left"),
    ],
)
def test_broken_files_are_refused_with_the_place(tmp_path, text, expected):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=expected):
        LeastSquares().fit(tmp_path / "a.csv", "y")


def test_predictions_of_files_name_a_missing_value_and_other_columns(tmp_path):
    model = LeastSquares().fit(write_csv(tmp_path / "a.csv", data()), "price")
    (tmp_path / "b.csv").write_text("rooms,size\n3,\n")
    with pytest.raises(ValueError, match=r"NaN .*'size' \(.*b\.csv, line 2\)"):
        model.predict(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("rooms\n3\n")
    with pytest.raises(ValueError, match=r"c\.csv has no column 'size'"):
        model.predict(tmp_path / "c.csv")
    unnamed = LeastSquares().fit(data()[:, :2], data()[:, 2])
    np.save(tmp_path / "d.npy", data())
    with pytest.raises(ValueError, match="has 3 columns, the model was fitted to 2"):
        unnamed.predict(tmp_path / "d.npy")


@pytest.mark.parametrize("estimator", [LeastSquares(), LeastSquares(solver="lbfgs"), LogisticRegression()])
def test_a_broken_line_that_one_rank_reads_is_refused_by_all(tmp_path, estimator):
    path = write_csv(tmp_path / "a.csv", np.round(data()))
    with open(path, "a") as file:
        file.write("1,many,2\n")

    def fit(_):
        with pytest.raises(ValueError, match=r"a\.csv, line 62: column 'rooms' has 'many'"):
            clone(estimator).fit(Files(path, target="price", piece_bytes=200))
        return True

    assert un.run_threads(fit, 3) == [True] * 3


def test_what_is_not_there_is_named(tmp_path):
    path = write_csv(tmp_path / "a.csv", data())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LeastSquares().fit(tmp_path / "nowhere.csv", "price")
    with pytest.raises(FileNotFoundError, match="no files at"):
        LeastSquares().fit(tmp_path / "*.parquet", "price")
    with pytest.raises(ValueError, match="no column 'value': its columns are size, rooms, price"):
        LeastSquares().fit(path, "value")
    with pytest.raises(ValueError, match="no target"):
        LeastSquares().fit(path)
    with pytest.raises(ValueError, match="name a column of theirs"):
        LeastSquares().fit(path, "price", sample_weight=np.ones(60))
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(ValueError, match=r"ends in \.csv"):
        LeastSquares().fit(tmp_path / "a.txt", "y")
    with pytest.raises(ValueError, match="missing='fill'"):
        Files(path, missing="fill")


def test_ranks_that_see_different_files_all_refuse(tmp_path):
    write_csv(tmp_path / "0.csv", data())

    def fit(world):
        with pytest.raises(ValueError, match=r"rank 1: no file at .*1\.csv"):
            LeastSquares().fit(tmp_path / f"{world.rank}.csv", "price")
        return True

    assert un.run_threads(fit, 2) == [True, True]


def test_too_many_classes_are_refused(tmp_path):
    write_csv(tmp_path / "a.csv", data(1500))
    with pytest.raises(ValueError, match="more than 1000 distinct values"):
        LogisticRegression().fit(tmp_path / "a.csv", "price")


def test_a_pass_over_a_file_takes_the_memory_of_some_pieces_only(tmp_path):
    path = tmp_path / "a.npy"
    whole = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=(100_000, 25))
    for start in range(0, 100_000, 10_000):
        x = np.random.default_rng(start).standard_normal((10_000, 24))
        whole[start : start + 10_000] = np.column_stack([x, x.sum(axis=1)])
    del whole
    tracemalloc.start()
    try:
        model = LeastSquares().fit(Files(path, target=-1, piece_bytes=1 << 20, keep_bytes=0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(model.coef_, np.ones(24), rtol=1e-9)
    assert peak < 6 << 20  # of 20 MB in the file
