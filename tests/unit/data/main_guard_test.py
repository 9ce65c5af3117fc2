"""Scripts with and without a ``__main__`` guard."""

from __future__ import annotations

import pytest

from hvd_hetero.data.main_guard import starts_horovod_on_import

HEAD = "import horovod.torch as hvd\nimport torch\n"


@pytest.mark.parametrize(
    "source",
    [
        "hvd.init()\n",
        "def main():\n    hvd.init()\nmain()\n",
        "def main():\n    setup()\ndef setup():\n    hvd.init()\nif True:\n    main()\n",
        "for _ in range(1):\n    hvd.init()\n",
    ],
)
def test_unguarded(source: str) -> None:
    assert starts_horovod_on_import(HEAD + source)


@pytest.mark.parametrize(
    "source",
    [
        "if __name__ == '__main__':\n    hvd.init()\n",
        "def main():\n    hvd.init()\nif __name__ == '__main__':\n    main()\n",
        "def main():\n    main()\nmain()\n",
        "class Run:\n    def go(self):\n        hvd.init()\n",
        "torch.init()\n",
        "this is no Python",
    ],
)
def test_guarded(source: str) -> None:
    assert not starts_horovod_on_import(HEAD + source)
