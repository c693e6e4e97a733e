"""A suite of tests that pytest runs, and that runs without it."""

from __future__ import annotations

from unittest import SkipTest


class Suite:
    """Tests, which are methods ``test_...``; pytest runs those of a class whose name begins with ``Test``."""

    @classmethod
    def check(cls) -> list[str]:
        """Runs every test, without pytest.

        Returns:
            The names of the tests that were left out.

        Raises:
            AssertionError: a test failed; it names the test.
        """
        left_out = []
        for name in filter(lambda name: name.startswith("test_"), dir(cls)):
            test = cls()
            test.setup_method()
            try:
                if callable(method := getattr(test, name)):
                    method()
                else:
                    left_out.append(name)
            except SkipTest:
                left_out.append(name)
            except Exception as error:
                raise AssertionError(f"{cls.__name__}.{name}: {error or type(error).__name__}") from error
            finally:
                test.teardown_method()
        return left_out

    def setup_method(self) -> None:
        """Begins a test."""

    def teardown_method(self) -> None:
        """Ends a test."""
