"""Tables as text."""

from muon_optax.inspect.tables import format_table


def test_format_table_aligns_columns():
    assert format_table(("a", "bcd"), [("xyz", "1"), ("", "")]) == "a    bcd\nxyz  1\n"
