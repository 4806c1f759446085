"""``PYTHONPATH=tests python -m hosts [MBIT]``, as root: two hosts joined by a link, to try a run over two machines by hand."""

import shlex
import sys

from .namespaces import two_hosts, why_not


def main() -> None:
    if problem := why_not():
        sys.exit(problem)
    rate_mbit = float(sys.argv[1]) if len(sys.argv) > 1 else 1000.0
    with two_hosts(rate_mbit) as hosts:
        print(f"Two hosts that share the file system, joined by a link of {rate_mbit:g} Mbit/s. A shell on each:\n")
        for host in hosts:
            print(f"  {host.name:5}  {host.address}  {shlex.join([*host.entry, 'bash'])}")
        print(f"\nCut the link: {shlex.join([*hosts[1].entry, 'ip', 'link', 'set', 'eth0', 'down'])}")
        print("Enter takes both hosts down, with all that runs on them.", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
