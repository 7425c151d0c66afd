import torchh  # noqa: F401

import everstep

everstep.run(lambda job: None)
