import base

import everstep


def main(job: everstep.Job) -> None:
    base.build(job)


everstep.run(main)
