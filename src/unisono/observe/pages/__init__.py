"""Pages of HTML with charts that open without a network: one file each."""

from unisono.observe.pages.page import Bars, Lines, Pairs, Section, Series, Table, write_page

__all__ = ["Bars", "Lines", "Pairs", "Section", "Series", "Table", "write_page"]
