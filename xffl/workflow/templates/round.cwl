# One round: all cells train, the model that they start from is measured meanwhile, and their exports are combined.
cwlVersion: v1.2
class: Workflow
requirements:
  MultipleInputFeatureRequirement: {}
inputs:
  project: Directory
  configuration: string
  rounds: int
  results: string
  site: File
  round: int
  start: Directory?
  more: boolean
steps:
  aggregate:
    run: aggregate.cwl
    in: {site: site, results: results, round: round, rounds: rounds}
    out: [model, round, more]
outputs:
  model: {type: Directory, outputSource: aggregate/model}
  next: {type: int, outputSource: aggregate/round}
  goes_on: {type: boolean, outputSource: aggregate/more}
