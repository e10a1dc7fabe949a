# One round: all cells train, the model that they start from is measured meanwhile, and their exports are combined.
cwlVersion: v1.2
class: Workflow
requirements:
  MultipleInputFeatureRequirement: {}
inputs: {project: Directory, configuration: string, rounds: int, results: string, site: File, round: int, start: 'Directory?',
  more: boolean, site_a: File, home_a: string, words_a: 'string[]', site_b: File, home_b: string, words_b: 'string[]'}
steps:
  train_a:
    run: train.cwl
    in:
      site: site_a
      home: home_a
      words: words_a
      project: project
      configuration: configuration
      round: round
      start: start
      cell: {default: '0/4,4'}
    out: [export]
  train_b:
    run: train.cwl
    in:
      site: site_b
      home: home_b
      words: words_b
      project: project
      configuration: configuration
      round: round
      start: start
      cell: {default: '1/4,4'}
    out: [export]
  measure:
    run: measure.cwl
    in:
      site: site_a
      home: home_a
      words: words_a
      project: project
      configuration: configuration
      start: start
      cell: {default: '0/4,4'}
    out: [metrics]
  aggregate:
    run: aggregate.cwl
    in:
      site: site
      results: results
      round: round
      rounds: rounds
      exports:
        source: [train_a/export, train_b/export]
        linkMerge: merge_flattened
      metrics: measure/metrics
    out: [model, round, more]
outputs:
  model: {type: Directory, outputSource: aggregate/model}
  next: {type: int, outputSource: aggregate/round}
  goes_on: {type: boolean, outputSource: aggregate/more}
