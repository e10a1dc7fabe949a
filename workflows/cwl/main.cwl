# Rounds over files, one after the other: begin where the last run has ended, and measure the final model.
cwlVersion: v1.2
class: Workflow
$namespaces: {cwltool: 'http://commonwl.org/cwltool#'}
requirements:
  SubworkflowFeatureRequirement: {}
  MultipleInputFeatureRequirement: {}
inputs: {project: Directory, configuration: string, rounds: int, results: string, site: File, first: int, site_a: File,
  home_a: string, words_a: 'string[]', site_b: File, home_b: string, words_b: 'string[]'}
steps:
  begin:
    run: begin.cwl
    in: {site: site, results: results, first: first, rounds: rounds}
    out: [start, round, more]
  federation:
    run: round.cwl
    in: {project: project, configuration: configuration, rounds: rounds, results: results, site: site, site_a: site_a, home_a: home_a,
      words_a: words_a, site_b: site_b, home_b: home_b, words_b: words_b, round: begin/round, start: begin/start, more: begin/more}
    out: [model, next, goes_on]
    requirements:
      cwltool:Loop:
        loopWhen: $(inputs.more)
        loop: {start: model, round: next, more: goes_on}
        outputMethod: last
  measure:
    run: measure.cwl
    in:
      site: site_a
      home: home_a
      words: words_a
      project: project
      configuration: configuration
      start:
        source: [federation/model, begin/start]
        pickValue: first_non_null
      cell: {default: '0/4,4'}
    out: [metrics]
  record:
    run: record.cwl
    in: {site: site, results: results, metrics: measure/metrics}
    out: [metrics]
outputs:
  model:
    type: Directory
    outputSource: [federation/model, begin/start]
    pickValue: first_non_null
  metrics: {type: File, outputSource: record/metrics}
