"""The parts that every question uses: servers, workers, rounds, tables, pictures."""
