"""``python -m megatron_prism`` is ``prism``."""

import sys


def main() -> int:
    """Run the command; Ctrl-C ends it in one line also while it is still being imported."""
    try:
        from megatron_prism.cli.main import main as command
    except KeyboardInterrupt:
        print("prism: interrupted", file=sys.stderr)
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
