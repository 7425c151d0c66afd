import base

import everstep


def main(job: everstep.Job) -> None:
    base.build(job)
    raise FileNotFoundError("no such file: /data/train.bin")


everstep.run(main)
