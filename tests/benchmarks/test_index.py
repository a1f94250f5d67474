from vertumnus_bench.index import figures, stores


def test_every_figure_comes_of_a_small_index() -> None:
    found = figures(blocks=5000, ranks=8)
    assert list(found) == [
        "match_2048_us",
        "store_per_s",
        "remove_per_s",
        "bytes_per_block",
        "scan_pause_ms",
        "scan_ticks",
        "scan_s",
    ]
    assert all(value > 0 for value in found.values())


def test_the_load_is_the_same_for_the_same_seed() -> None:
    assert list(stores(3000, 8)) == list(stores(3000, 8))
    assert list(stores(3000, 8, seed=1)) != list(stores(3000, 8))
