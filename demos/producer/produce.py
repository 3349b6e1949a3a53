"""Send one text, now or later."""

import argparse
from datetime import timedelta
from pathlib import Path

from lisa import Producer

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("text")
arguments.add_argument("--delay", type=float, default=0.0, help="seconds")
given = arguments.parse_args()

with Producer.from_config(Path(__file__).with_name("producer.yml")) as producer:
    print(producer.send("mystream", given.text, delay=timedelta(seconds=given.delay)))
