"""What two or more test files share: checks, stores that fail, servers and proxies, sample runs, agents to crash.

A test file imports from here, never from another test file or a conftest (`tests/test_imports.py` sees to it).
"""
