from ppo_repro.cli import main

main()
