#!/usr/bin/env python3
"""Whether products under way read registers that are written meanwhile: `check_wgmma.py OBJECT...`, for objects with code for sm_90a.

wgmma reads its operand A from registers after it was issued, until a wait says that it is done. The compiler keeps clear of them
where values have registers of their own, but a register that the source itself writes again in a loop is the source's to guard.
In every loop with wgmma of the SASS (`cuobjdump --dump-sass`, which must be on PATH) this follows three rounds: products in flight,
waits, and what every instruction writes. Exit code 1 when one writes what a product in flight reads.
"""

import re
import subprocess
import sys

NO_REGISTER = ("ST", "RED", "BRA", "BAR", "WARPGROUP", "SYNCS", "U", "R2UR", "BSYNC", "BSSY", "EXIT", "NOP", "CALL", "RET", "DEPBAR")


def written(instruction):
    """The registers that an instruction writes."""
    text = re.sub(r"^@!?U?P\w+ ", "", instruction)
    opcode = text.split()[0]
    match = re.match(r"\S+\s+(?:P\w+,\s*)?R(\d+)", text)
    if opcode.startswith(NO_REGISTER) or not match:
        return set()
    count = 4 if ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
    return set(range(int(match.group(1)), int(match.group(1)) + count))


def loops(function):
    """Instructions of every loop, by its backward branch."""
    code = [(int(m.group(1), 16), m.group(2)) for m in re.finditer(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", function, re.M)]
    index = {address: at for at, (address, _) in enumerate(code)}
    for at, (address, text) in enumerate(code):
        match = re.search(r"BRA\S*\s+.*0x([0-9a-f]+)", text)
        if match and int(match.group(1), 16) in index and int(match.group(1), 16) < address:
            yield [text for _, text in code[index[int(match.group(1), 16)] : at + 1]]


def hazards(body):
    """Instructions of a loop that write what a product in flight reads."""
    flight, found = [], []
    for instruction in body * 3:
        product = re.search(r"HGMMA\S*\s+R\d+,\s*R(\d+)", instruction)
        wait = re.search(r"DEPBAR\.LE gsb0, 0x([0-9a-f]+)", instruction)
        if product:
            flight.append(set(range(int(product.group(1)), int(product.group(1)) + 4)))
        elif wait:
            flight = flight[max(0, len(flight) - int(wait.group(1), 16)) :]
        elif any(written(instruction) & operand for operand in flight):
            found.append(instruction)
    return found


def check(path):
    """The number of hazards of an object, and of loops that were looked at. Loops around loops are left to the inner ones."""
    sass = subprocess.run(["cuobjdump", "--dump-sass", path], capture_output=True, text=True, check=True).stdout
    bad, seen = 0, 0
    for function in sass.split("Function : ")[1:]:
        for body in loops(function):
            if not 4 <= sum("HGMMA" in instruction for instruction in body) <= 16:
                continue
            seen += 1
            for instruction in hazards(body):
                bad += 1
                print(f"{path}: {function.splitlines()[0].strip()}: {instruction.strip()}")
    return bad, seen


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    results = [check(path) for path in sys.argv[1:]]
    print(f"{sum(seen for _, seen in results)} loops, {sum(bad for bad, _ in results)} hazards")
    sys.exit(1 if any(bad for bad, _ in results) or not any(seen for _, seen in results) else 0)


if __name__ == "__main__":
    main()
