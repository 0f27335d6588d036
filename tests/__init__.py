"""The tests. This folder is a package so that they all import what they share as `tests.support`."""
